// Maps.
let absent;
export { absent as geoAlbers, absent as geoAlbersUsa, absent as geoAzimuthalEqualArea, absent as geoAzimuthalEquidistant, absent as geoCentroid, absent as geoClipRectangle, absent as geoConicConformal, absent as geoConicEqualArea, absent as geoConicEquidistant, absent as geoEqualEarth, absent as geoEquirectangular, absent as geoGnomonic, absent as geoGraticule10, absent as geoMercator, absent as geoOrthographic, absent as geoPath, absent as geoStereographic, absent as geoStream, absent as geoTransverseMercator };
export const geoTransform = () => absent; // called while the library is loaded
